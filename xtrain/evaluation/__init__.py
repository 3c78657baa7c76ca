"""Evaluation: files of test items, perplexity, accuracy, exact match."""
