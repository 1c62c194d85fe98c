"""Rules between settings, one subject per file. Each check yields a sentence for every violation: the flags with their
values, the rule, and the nearest legal values. They run before any process group exists, all of them, every time."""
