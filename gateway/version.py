"""The version of Sluice, of which there is one: what is built from the sources is named after it."""

VERSION = "0.1.0"
