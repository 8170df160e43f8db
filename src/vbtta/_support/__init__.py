"""Small helpers that know nothing of statistics: files, optional packages, random streams."""
