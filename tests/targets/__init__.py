"""Tests of the targets that pdlib brings."""
