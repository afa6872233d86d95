"""The rollout server: tasks in, results out. The ledger decides; what is here tells it and asks it over HTTP."""
