"""A run as one page of HTML."""
