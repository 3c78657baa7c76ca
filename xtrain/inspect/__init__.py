"""Inspect a machine, a model or a training step: doctor, compare, gradcheck, profile."""
