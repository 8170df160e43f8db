"""Continuous labels as a mixture of calibrated views."""
