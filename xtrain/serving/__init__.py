"""Generation: requests, the KV-cached model, the engine, text streaming, chat templates."""
