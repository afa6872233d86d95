"""Gateways on many machines. What starts them there is what users already run: Ray, Slurm or Kubernetes. Each of them
starts the same gateway as ``polar serve --role gateway --server URL`` does, and none of them knows a session: those,
their leases and their results are the rollout server's.
"""
