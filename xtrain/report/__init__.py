"""Reports: one HTML page about a run, or about several runs compared."""
