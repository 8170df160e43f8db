"""Ordered levels by a cumulative probit."""
