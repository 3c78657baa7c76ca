"""Serving: requests, the model with a KV cache, the engine, text streaming, chat templates."""
