"""Fine-tuning: conversations as training data."""
