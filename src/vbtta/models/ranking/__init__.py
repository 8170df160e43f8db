"""Rankings by Plackett-Luce."""
