// Package config holds the small, pure decisions behind Baton's flags: how the
// cores of a machine are divided between workers ([DivideCores]) and which ports are
// free ([FreePorts]).
package config
