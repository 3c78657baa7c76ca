"""The pieces of a run's page; ../report.py puts them together."""
