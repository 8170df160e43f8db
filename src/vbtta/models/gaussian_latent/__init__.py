"""Continuous labels around one weighted average of the views."""
