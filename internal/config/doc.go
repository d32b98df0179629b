// Package config holds the small, pure decisions behind Baton's flags: how the
// cores of a machine are divided between workers ([DivideCores]), how many goroutines may run at once ([SpareProcs]) and which ports are
// free ([FreePorts]).
package config
