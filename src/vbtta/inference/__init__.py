"""Engines that depend on no model: EM, ADVI, blocks, Laplace approximations, small matrices."""
