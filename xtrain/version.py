"""The version of xtrain, which setup.cfg reads from here."""

VERSION = "0.2.0"
