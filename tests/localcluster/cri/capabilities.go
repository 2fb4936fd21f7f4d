package cri

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// capabilitySet has one bit for each of the kernel's capabilities, by number.
type capabilitySet uint64

const everyCapability = ^capabilitySet(0)

// capabilityNames by number.
var capabilityNames = strings.Fields("CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE " +
	"NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT " +
	"SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE " +
	"MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE")

// defaultCapabilities are those that other runtimes give a container that asks for nothing.
var defaultCapabilities = mustParse("CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE NET_RAW SYS_CHROOT " +
	"MKNOD AUDIT_WRITE SETFCAP")

func mustParse(names string) (set capabilitySet) {
	for _, name := range strings.Fields(names) {
		c, err := parseCapability(name)
		if err != nil {
			panic(err)
		}
		set |= c
	}
	return set
}

func parseCapability(name string) (capabilitySet, error) {
	short := strings.TrimPrefix(strings.ToUpper(name), "CAP_")
	if short == "ALL" {
		return everyCapability, nil
	}
	if i := slices.Index(capabilityNames, short); i >= 0 {
		return 1 << i, nil
	}
	return 0, fmt.Errorf("there is no capability %q", name)
}

// capabilities of a container. ALL counts before single names, so that drop ALL with add KILL leaves KILL.
func capabilities(sc *v1.LinuxContainerSecurityContext) (capabilitySet, error) {
	if sc.GetPrivileged() {
		return everyCapability, nil
	}
	set := defaultCapabilities
	var add, drop capabilitySet
	for _, names := range []struct {
		list   []string
		single *capabilitySet
		all    capabilitySet
	}{{sc.GetCapabilities().GetAddCapabilities(), &add, everyCapability}, {sc.GetCapabilities().GetDropCapabilities(), &drop, 0}} {
		for _, name := range names.list {
			c, err := parseCapability(name)
			if err != nil {
				return 0, err
			}
			if c == everyCapability {
				set = names.all
			} else {
				*names.single |= c
			}
		}
	}
	return (set | add) &^ drop, nil
}
