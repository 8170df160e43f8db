"""The paper's experiments: small networks, their training, and one file per table or figure."""
