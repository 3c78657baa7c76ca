"""Mixture of experts: which expert computes which row, and the products of many experts."""
