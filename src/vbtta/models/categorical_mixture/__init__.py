"""Class labels from a mixture of calibrated views."""
