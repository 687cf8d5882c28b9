"""Inputs of ones, as masks that mask nothing: told apart."""
