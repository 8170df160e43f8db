"""Engines that know no model: EM, ADVI, blocks, Laplace approximations, small matrices."""
