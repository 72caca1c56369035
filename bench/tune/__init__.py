"""Trace in, report out: how much cache, and which policy, for your own traffic."""
