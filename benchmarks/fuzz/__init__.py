"""Bad input by the hundred thousand: mutated files, hostile arrays and degenerate fits, each case known by its seed."""
