"""Admission, order of training and bookkeeping of groups: pure."""
