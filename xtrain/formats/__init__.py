"""Weights in and out of files: safetensors, manifest, the Hugging Face layout, GGUF."""
