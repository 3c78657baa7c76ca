"""A decoding step in one kernel."""
