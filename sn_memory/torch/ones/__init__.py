"""Inputs of ones, as masks that mask nothing: told apart, and looked at while tracing."""
