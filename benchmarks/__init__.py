"""Measurements: the same work on Mini-Infer and on its peers, side by side on one machine.

Contract: a figure counts when a command here printed it. Each run is a process of its own that writes one JSON file
with commit, versions, hardware and seeds; ``compare`` joins them.
"""
