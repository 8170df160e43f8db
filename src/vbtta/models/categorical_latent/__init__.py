"""Class labels from one weighted sum of the views' logits."""
