"""What Polar costs: CPU and latency of a call, and time, memory and bytes of a long session.

``python -m benchmarks`` runs all of it on loopback in about two minutes; ``docs/benchmarks.md`` says how.
"""
