"""Estimators against enumeration, diversity against closed forms."""
