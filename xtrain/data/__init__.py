"""Text: documents and their split, the tokenizer, token shards and batches."""
