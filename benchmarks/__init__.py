"""Measurements that are too long for the tests: quality on real data, speed, and the networks they need."""
