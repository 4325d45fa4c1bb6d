"""The registry owns membership: which workers live, and which global ranks each owns.

`membership` and `view` are pure; `bucket`, `admission` and `mirror` talk to JetStream; `client` is what other services import.
"""
