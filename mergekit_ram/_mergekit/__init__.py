"""The only place that touches what MergeKit does not offer as an interface.

Each touch stands with its reason; ``tests/test_mergekit_internals.py`` fails for each with a
message that says what a MergeKit release has changed. Several modules: ``methods`` is imported
while MergeKit's own merge methods are; ``merging``, ``tokenizers`` and ``planning`` are what its
planner and ``run_merge`` are extended by, and need much more of MergeKit; ``commands`` imports
``mergekit.merge`` itself, which the others are imported during.
"""
