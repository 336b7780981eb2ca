"""The only place that touches what MergeKit does not offer as an interface.

Each touch stands with its reason; ``tests/test_mergekit_internals.py`` fails for each with a
message that says what a MergeKit release has changed. Two modules, since ``methods`` is imported
while MergeKit's own merge methods are, and ``planning`` needs much more of MergeKit.
"""
