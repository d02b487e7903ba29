"""Engine connectors for kvd, installed as ``kvd_connectors``.

This ring knows an engine's KV layout and hooks; it uses only kvd's client.
"""
