"""The proxy (one pipeline for every dialect) and the session lifecycle. This room puts the others together."""
