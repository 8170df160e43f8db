"""Labels, predictions and images, and the files that hold them."""
