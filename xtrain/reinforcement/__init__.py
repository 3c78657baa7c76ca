"""Reinforcement learning: a model learns from rewards for what it generates."""
