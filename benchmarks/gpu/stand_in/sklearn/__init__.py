"""Stands in for scikit-learn where it is not installed; see datasets.py."""
