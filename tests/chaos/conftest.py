"""Fixtures: the databases, with a separate PostgreSQL server, as the tests kill the server, too."""

from tests.databases import database_url as database_url
from tests.databases import postgres_server as postgres_server
from tests.databases import postgres_url as postgres_url
from tests.databases import sqlite_template as sqlite_template
from tests.databases import sqlite_url as sqlite_url
