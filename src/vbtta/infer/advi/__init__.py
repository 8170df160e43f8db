"""ADVI on Pyro (extra `advi`): the same joint densities with z and t summed out, and what closed forms cannot do.

`guide` and the posteriors need NumPy and SciPy only, so that a policy fitted here is used anywhere; torch and Pyro
are imported by the modules that fit.
"""
