"""Tile shapes, measured."""
