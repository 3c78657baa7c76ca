"""What only serving needs: the KV cache, matrix-vector products, sampling, packed prompts."""
