"""The runtimes of one machine: a process for each, with one host cache for all, below `staccato up` or below
`staccato node`, the process of this folder.

This folder starts and ends processes and reads files of the machine; the folder speaks to no bus, and decides on no
request."""
