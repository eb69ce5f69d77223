"""The reasons for which the embedded store cannot serve.

    EmbeddedStoreError
    ├── ServerNotFound       no server program that could be run
    ├── DirectoryUnusable    the folder of its data cannot be used as it is
    ├── DataDamaged          the server refuses the data that it finds; nothing was changed
    └── ServerUnavailable    it ended, or did not answer in time

Every message names the file and the remedy.
"""


class EmbeddedStoreError(Exception):
    pass


class ServerNotFound(EmbeddedStoreError):
    pass


class DirectoryUnusable(EmbeddedStoreError):
    pass


class DataDamaged(EmbeddedStoreError):
    pass


class ServerUnavailable(EmbeddedStoreError):
    pass
