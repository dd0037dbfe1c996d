"""Tests of zerofx; the folders mirror the package."""
