"""What goes over the wire or onto disk: the words of Polar as plain data. No logic lives here.

Every room may import this one; this one imports nothing of Polar.
"""
