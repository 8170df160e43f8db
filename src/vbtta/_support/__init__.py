"""Small helpers without statistics: files, optional packages, random streams."""
